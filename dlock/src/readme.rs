//! The code in the documents, compiled and run as doc tests. Nothing else reads this file, so a published
//! package may lack them.
#![doc = include_str!("../../README.md")]
#![doc = include_str!("../../docs/acquiring.md")]
#![doc = include_str!("../../docs/cron.md")]
#![doc = include_str!("../../docs/re-entry.md")]
#![doc = include_str!("../../docs/testing.md")]
#![doc = include_str!("../../docs/web-service.md")]

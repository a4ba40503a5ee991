//! The code in the documents, compiled and run as doc tests. Nothing else reads this file, so a published package may lack them.
#![doc = include_str!("../../README.md")]

//! The code in the documents, compiled and run as doc tests. It stands outside the published packages, which cannot
//! include files from above their folders.
#![cfg_attr(doctest, doc = include_str!("../README.md"))]
#![cfg_attr(doctest, doc = include_str!("acquiring.md"))]
#![cfg_attr(doctest, doc = include_str!("cron.md"))]
#![cfg_attr(doctest, doc = include_str!("election.md"))]
#![cfg_attr(doctest, doc = include_str!("re-entry.md"))]
#![cfg_attr(doctest, doc = include_str!("sharing.md"))]
#![cfg_attr(doctest, doc = include_str!("testing.md"))]
#![cfg_attr(doctest, doc = include_str!("web-service.md"))]

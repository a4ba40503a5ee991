//! Tests of the scripts without the core: the keys after each step, and the messages on the channels.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod alike;
mod bed;
mod dead;
mod keys;
mod several;
mod shares;
mod turns;

//! The scripts by hand: what stands under the keys after each step, and what is said on the channels.

#![allow(clippy::unwrap_used, reason = "helpers of tests are tests")]

mod alike;
mod bed;
mod dead;
mod keys;
mod several;
mod turns;

//! The suite over Redis.
fn main() {}

//! What only a file can suffer.

fn main() {}

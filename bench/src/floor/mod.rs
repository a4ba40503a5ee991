//! What nothing can be faster than: the least a lock has to do, written down once for each store.

pub(crate) mod memory;
pub(crate) mod redis;

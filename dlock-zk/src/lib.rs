//! Dlock's ZooKeeper driver: ephemeral sequential nodes, each watching the one ahead.

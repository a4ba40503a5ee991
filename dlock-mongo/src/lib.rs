//! Dlock's MongoDB driver: findAndModify on the server's clock, majority writes, woken by a change stream.

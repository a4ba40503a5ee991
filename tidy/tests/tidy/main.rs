//! What no linter sees. Every test is one rule; its message says what to do. Rules are pure functions from
//! text to complaints, each with a test that shows it can fail; `tree` reads the workspace once. Needs
//! nothing but the standard library and cargo.

mod clauses;
mod dependencies;
mod documents;
mod drivers;
mod links;
mod methods;
mod sources;
mod tree;

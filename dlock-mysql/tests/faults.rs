//! What goes wrong with a real server.

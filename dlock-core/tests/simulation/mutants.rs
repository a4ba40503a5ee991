//! The simulation can fail: cores that are wrong on purpose are found, each within so many worlds.

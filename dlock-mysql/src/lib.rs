//! Dlock's MySQL and MariaDB driver: one row per name, one statement per step.

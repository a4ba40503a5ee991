//! What only a MongoDB server can suffer.

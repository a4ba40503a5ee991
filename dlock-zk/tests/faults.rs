//! What breaks between a client and its servers.

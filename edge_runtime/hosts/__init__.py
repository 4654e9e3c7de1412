"""Child processes that run models, and the memory that they share with the daemon and with clients."""

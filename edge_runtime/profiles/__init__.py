"""Facts of this host, device profiles, and the choice of one."""

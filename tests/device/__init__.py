"""Devices that boot a real systemd in a container: the package and the service, tried as a whole."""

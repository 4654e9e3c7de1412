"""How clients reach the daemon: the contract of a door, the loop that owns their sockets, one folder for each."""

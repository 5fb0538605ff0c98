"""Everything of a relay that touches sockets: its sessions, its links to other relays and its connections to other sites."""

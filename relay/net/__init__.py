"""The parts of a relay that use sockets: sessions, links to other relays and connections to other sites."""

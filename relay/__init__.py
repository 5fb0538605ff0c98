"""The relay: the daemon that each host runs. Users of the library never import it."""

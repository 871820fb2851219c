"""How ranks talk: collectives written by hand, the arithmetic of links, and measurements on real ranks."""

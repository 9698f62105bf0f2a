"""Process groups, rendezvous, mesh and axes. Communicates only to form groups."""

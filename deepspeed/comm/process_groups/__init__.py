"""Process groups, rendezvous, mesh and axes: which ranks exist. Sends only to form groups."""

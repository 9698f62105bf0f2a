"""Observers of collectives: timeouts, desync detection and logs."""

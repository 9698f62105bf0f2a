"""Observes collectives: timeouts, desync detection, logs. Collectives call it at one place."""

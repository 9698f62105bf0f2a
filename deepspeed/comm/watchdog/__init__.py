"""Observes collectives: timeouts, desync detection, logs. Collectives report to it by one call."""

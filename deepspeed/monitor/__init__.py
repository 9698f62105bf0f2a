"""Monitors, which write metrics to files and dashboards, each in a separate process."""

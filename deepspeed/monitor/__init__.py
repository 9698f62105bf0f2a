"""Where a run's numbers go: files, dashboards, each written by a process of its own."""

"""Commands of whoever works on this repository; none of them is installed."""

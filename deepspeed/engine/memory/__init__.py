"""Memory reports and advice."""

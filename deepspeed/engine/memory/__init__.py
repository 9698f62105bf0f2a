"""Memory reports and suggestions."""

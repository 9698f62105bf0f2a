"""Simulator of a recorded step on a machine: overlap, exposed communication, host limits."""

"""Lanes: in-order queues that run the ops of a schedule beside compute."""

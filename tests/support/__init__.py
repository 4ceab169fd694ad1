"""Models and runs that several tests share."""

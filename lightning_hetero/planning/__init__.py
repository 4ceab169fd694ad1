"""Planning while a model trains: what is measured, when a plan is made, and for which machine."""

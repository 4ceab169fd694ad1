"""Training on devices that differ: plans of clusters, and what runs them. Separate from offloading; nothing there imports it."""

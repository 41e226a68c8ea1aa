"""A step-level simulation of engine replicas behind the admission queue. Every number it gives is simulated."""

"""Fast forwards on a processor: weights in its own layout, few operators between the products."""

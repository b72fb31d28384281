"""What a case can be: each kind is a function of a `random.Random` and a seed that raises where something is wrong."""

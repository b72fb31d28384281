"""Random models and random damage, each drawn from one number, and judges that nobody of the package wrote.

Reading order: draw, reference, tower_reference, judge, batch, kinds (a folder: one file a kind of case), differential;
damage, originals, loading, corruption; runner, __main__. `python -m fuzz --help`, from the folder `tests`, says how to
run more of either.
"""

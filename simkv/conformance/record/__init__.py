"""Record the decisions of engines' own schedulers and determine the rules of a release."""

"""Record decisions of the engines' released schedulers and determine the rules of a release."""

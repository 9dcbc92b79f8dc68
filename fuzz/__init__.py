"""Coverage-guided fuzzing: ``make fuzz MINUTES=n``. Any input gives a result that verifies, the input untouched, or an
error of ours; whatever else happens is a find."""

"""Running a model under observation: intercepted calls, recorded arrays, switched quantizers."""

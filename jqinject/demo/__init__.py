"""The main job: a small classifier on scikit-learn's bundled digits, quantized in several ways."""

"""The state of quantizers: variables, histories, ranges that are collected."""

package main

func generate(seed, number uint64) *World { return &World{} }

module divvy.dev/e2e/parts/pause

go 1.26.0

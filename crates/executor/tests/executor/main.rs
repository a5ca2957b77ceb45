//! The executor over seams that crash, lose what was not synced, and answer late ([`world`]), and over real files.

#[cfg(test)]
mod bad_input;
#[cfg(test)]
mod behaviour;
#[cfg(test)]
mod crash;
#[cfg(test)]
mod files;
#[cfg(test)]
mod world;

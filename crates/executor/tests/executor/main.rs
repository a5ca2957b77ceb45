//! The executor over seams that crash, lose what was not synced, and answer late ([`world`]), and
//! over real files.

#![expect(clippy::result_large_err, reason = "as in the crate itself")]

#[cfg(test)]
mod asked;
#[cfg(test)]
mod bad_input;
#[cfg(test)]
mod behaviour;
#[cfg(test)]
mod compute_mode;
#[cfg(test)]
mod crash;
#[cfg(test)]
mod files;
#[cfg(test)]
mod in_use;
#[cfg(test)]
mod lost_records;
#[cfg(test)]
mod metadata;
#[cfg(test)]
mod mig_crash;
#[cfg(test)]
mod mig_hardware;
#[cfg(test)]
mod mig_lost;
#[cfg(test)]
mod mig_mode;
#[cfg(test)]
mod mig_others;
#[cfg(test)]
mod mig_port;
#[cfg(test)]
mod mig_records;
#[cfg(test)]
mod mig_rows;
#[cfg(test)]
mod mig_rules;
#[cfg(test)]
mod mig_world;
#[cfg(test)]
mod modes;
#[cfg(test)]
mod mps;
#[cfg(test)]
mod mps_parts;
#[cfg(test)]
mod mps_rounds;
#[cfg(test)]
mod mps_world;
#[cfg(test)]
mod numbers;
#[cfg(test)]
mod odd;
#[cfg(test)]
mod odd_looks;
#[cfg(test)]
mod one_look;
#[cfg(test)]
mod owned;
#[cfg(test)]
mod queries;
#[cfg(test)]
mod race;
#[cfg(test)]
mod rebuilt;
#[cfg(test)]
mod rounds;
#[cfg(test)]
mod story;
#[cfg(test)]
mod taken_back;
#[cfg(test)]
mod world;

//! The cases. Each is a sentence about the driver on a real Kubernetes; the name is what a report
//! shows.
//!
//! The node has 11 GPUs of one kind, which cases share as they need them, and one each of five
//! other kinds. A case that needs a certain GPU takes one of those, which is then its own: the
//! comment at [`GPUS`] says whose. There are two sets of cases, each with a cluster of its own,
//! side by side.

mod apply;
mod chart;
mod claims;
mod corpus;
mod defrag;
mod examples;
mod faults;
mod health;
mod hook;
mod hostile;
mod life;
mod mig;
mod migration;
mod neighbours;
mod nvidia_driver;
mod pods;
mod policy;
mod shares;
mod stand_in;
mod status;
mod successors;

use anyhow::Result;

use faults::undisturbed;

use crate::case::{Case, Clusters, Env};

/// The node's GPUs. `a30`: successors::claim_reused; `l40s`: pods::selectors; `l4`:
/// successors::force_deleted; `t4`: successors::stubborn; `a100-40`: successors::in_use.
pub const GPUS: &str = "h100x11,a30x1,l40sx1,l4x1,t4x1,a100-40x1";

/// The product that cases share.
const SHARED: &str = "NVIDIA H100 80GB HBM3";

/// Cases that have a cluster to themselves, in the order in which they run there.
#[derive(Debug, Clone, Copy)]
pub struct Set {
    /// The cluster's name.
    pub cluster: &'static str,
    pub cases: &'static [Case],
}

/// Whole GPUs, as the chart offers them by default; partitions and shares, which take about as
/// long.
pub const SETS: [Set; 2] = [
    Set {
        cluster: "e2e",
        cases: WHOLE,
    },
    Set {
        cluster: "e2e-modes",
        cases: MODES,
    },
];

const WHOLE: &[Case] = &[
    together("one_pod_gets_one_gpu", pods::one_pod_one_gpu),
    together("two_pods_get_two_gpus", pods::two_pods_two_gpus),
    together(
        "a_pod_in_a_user_namespace_uses_its_gpu",
        pods::user_namespace,
    ),
    together("two_pods_share_one_claim", pods::one_claim_two_pods),
    together(
        "two_containers_share_one_claim",
        pods::one_claim_two_containers,
    ),
    together("one_pod_uses_two_claims", pods::two_claims_one_pod),
    together("one_claim_gets_two_gpus", pods::count_two),
    together(
        "more_gpus_than_the_node_has_stay_pending",
        pods::count_beyond_node,
    ),
    together(
        "cel_selects_by_product_memory_and_versions",
        pods::selectors,
    ),
    together(
        "a_deployment_gets_its_gpus_from_a_template",
        pods::deployment,
    ),
    together("deleting_a_pod_frees_its_gpu", pods::deletion_frees),
    of_versions(
        "claims_that_cannot_be_meant_are_refused_when_they_are_applied",
        apply::wrong_claims,
    ),
    together(
        "a_config_that_its_node_cannot_serve_is_reported_to_the_user",
        pods::not_offered,
    ),
    together("an_image_reads_nothing_through_the_hook", hostile::images),
    together(
        "read_only_roots_volumes_and_ldconfig_leave_the_driver_found",
        hook::roots_and_volumes,
    ),
    together(
        "a_claim_serves_one_pod_after_another",
        successors::claim_reused,
    ),
    together(
        "a_pod_follows_a_force_deleted_one_within_seconds",
        successors::force_deleted,
    ),
    together(
        "no_pod_gets_a_gpu_while_its_old_pod_lives",
        successors::stubborn,
    ),
    together(
        "a_gpu_in_use_is_tainted_and_not_given_out",
        successors::in_use,
    ),
    together(
        "a_plugin_may_write_only_slices_of_its_own_node",
        policy::own_slices,
    ),
    together(
        "a_plugin_may_write_only_its_own_part_of_a_claims_status",
        policy::own_status,
    ),
    together("a_plugin_may_write_only_its_own_events", policy::own_events),
    together(
        "who_may_view_the_cluster_may_ask_for_status",
        policy::viewers,
    ),
    together(
        "the_plugin_runs_with_what_it_needs_and_no_more",
        policy::plugin_pod,
    ),
    of_versions("the_api_server_takes_what_the_chart_makes", chart::taken),
    together(
        "the_publisher_passes_its_corpus_on_this_api_server",
        corpus::all,
    ),
    together(
        "an_edited_reserved_for_takes_nothing_from_a_running_pod",
        claims::reserved_for_edited,
    ),
    together(
        "a_gpu_node_that_is_deleted_comes_back",
        status::gpu_node_deleted,
    ),
    alone(
        "a_killed_plugin_goes_on_under_running_pods",
        faults::plugin_killed,
    ),
    alone(
        "a_pod_reads_what_its_gpus_are_also_after_a_killed_plugin_has_lost_the_files",
        pods::metadata,
    ),
    alone(
        "a_plugin_that_hangs_is_replaced_within_a_minute",
        faults::plugin_hangs,
    ),
    alone(
        "slices_come_back_after_a_restart_of_the_kubelet",
        faults::kubelet_restarted,
    ),
    alone(
        "nothing_is_lost_while_the_api_server_is_away",
        faults::api_server_stopped,
    ),
    alone(
        "a_plugin_whose_folder_was_emptied_beside_its_slices_goes_on",
        faults::folder_emptied,
    ),
    alone(
        "a_claim_deleted_while_the_plugin_is_away_is_undone",
        faults::claim_deleted_meanwhile,
    ),
    alone("nothing_is_lost_while_etcd_is_held", faults::etcd_held),
    alone(
        "slices_that_another_client_edits_are_put_back",
        faults::slices_edited,
    ),
    alone(
        "a_wiped_claim_keeps_its_gpu_until_its_pod_is_gone",
        claims::status_wiped,
    ),
    alone(
        "admin_access_is_for_the_namespaces_of_the_chart",
        chart::admin_access,
    ),
    alone(
        "an_uninstalled_release_leaves_what_its_page_says",
        chart::uninstalled,
    ),
    modes(
        "pods_of_the_device_plugin_get_each_mode_by_their_limits",
        chart::extended_resources,
    ),
    modes(
        "profile_shared_makes_the_name_of_gpus_stand_for_shares",
        chart::profile_shared,
    ),
    modes(
        "mig_mode_of_a_deleted_policy_is_given_back_and_its_gpu_is_whole",
        mig::policy_deleted,
    ),
    alone(
        "an_update_that_never_gets_ready_takes_nothing_over",
        faults::updated_badly,
    ),
    alone(
        "an_update_hands_over_and_a_driver_root_can_be_set",
        faults::updated,
    ),
    alone(
        "a_driver_that_is_reloaded_taints_and_is_used_again",
        life::driver_reloaded,
    ),
    alone(
        "the_driver_is_let_go_while_the_node_is_drained",
        life::drained,
    ),
    alone("claims_live_through_a_reboot", life::rebooted),
    alone("a_gpu_that_strangers_use_is_not_given_out", life::strangers),
    alone(
        "what_the_device_plugin_has_given_out_is_not_given_out",
        neighbours::device_plugin,
    ),
    alone(
        "nodes_move_from_the_device_plugin_one_by_one",
        migration::one_by_one,
    ),
    alone("a_pod_is_moved_so_that_a_large_claim_fits", defrag::moved),
    alone(
        "manifests_for_nvidias_driver_run_unchanged_under_its_name",
        stand_in::manifests,
    ),
    alone(
        "nodes_move_from_nvidias_driver_to_divvy_under_its_name_and_back",
        stand_in::node_by_node,
    ),
    alone(
        "the_second_driver_of_nvidia_runs_beside_divvy",
        stand_in::second_driver,
    ),
    alone(
        "what_another_driver_has_given_out_is_not_given_out",
        neighbours::other_driver,
    ),
    alone(
        "two_drivers_of_ours_never_give_one_gpu_to_two_pods",
        neighbours::two_releases,
    ),
    alone(
        "the_first_hold_is_refused_while_strangers_compute",
        neighbours::first_hold,
    ),
    alone(
        "cdi_files_follow_an_upgraded_driver",
        nvidia_driver::upgraded,
    ),
    alone(
        "a_driver_that_comes_after_the_plugin_is_found",
        nvidia_driver::late,
    ),
    alone("no_claim_fails_in_rolling_updates", life::rolling_updates),
    alone(
        "the_plugin_can_be_a_program_of_the_node",
        faults::host_process,
    ),
    alone(
        "an_unhealthy_gpu_is_tainted_reported_to_its_pod_and_allocated_again_after_recovery",
        health::xid,
    ),
    alone(
        "a_later_pod_of_a_claim_gets_an_event_about_its_unhealthy_gpu",
        claims::later_pods,
    ),
    alone(
        "a_taint_rule_of_an_admin_keeps_claims_off_its_gpu_unless_they_tolerate_it",
        health::tainted_by_an_admin,
    ),
    alone(
        "a_policy_lets_pods_leave_a_sick_gpu_and_no_other",
        health::evicted,
    ),
    alone(
        "a_lost_gpu_is_tainted_under_its_pod_and_comes_back",
        health::lost,
    ),
    alone(
        "status_shows_holders_lost_gpus_and_why_a_claim_waits",
        status::shows,
    ),
    // Of every mode: here because it begins with the default offer, and the other set takes longer.
    modes("every_example_runs_as_it_is", examples::all),
];

/// The first of these that needs it installs the chart with `profile=everything`.
const MODES: &[Case] = &[
    modes("partitions_are_made_again_after_a_reboot", mig::rebooted),
    modes(
        "a_partition_that_is_gone_under_a_pod_is_not_replaced",
        mig::gone,
    ),
    modes(
        "a_node_that_loses_its_label_has_its_mig_mode_back",
        mig::left,
    ),
    // Minutes of waiting for cards; what is beside it has the offer that the case before these
    // installs.
    together(
        "cards_are_exchanged_under_the_plugin",
        nvidia_driver::exchanged,
    ),
    beside(
        "pods_get_partitions_of_each_profile_in_turn_without_a_restart",
        mig::each_profile,
    ),
    beside(
        "a_pod_in_a_user_namespace_uses_its_partition",
        mig::user_namespace,
    ),
    beside("partitions_fill_a_gpu_and_no_more", mig::full_gpu),
    beside(
        "a_whole_gpu_waits_for_its_partitions_and_they_for_it",
        mig::whole_gpu,
    ),
    beside("two_containers_get_a_partition_each", mig::two_containers),
    beside(
        "partitions_are_on_one_gpu_if_the_claim_says_so",
        mig::same_gpu,
    ),
    modes(
        "a_sick_partition_is_tainted_with_what_overlaps_it_and_its_neighbour_is_not",
        mig::sick,
    ),
    modes(
        "no_partition_is_lost_or_leaked_by_a_killed_plugin",
        mig::killed,
    ),
    modes(
        "a30_and_a100_are_cut_when_an_admin_has_set_their_mode",
        mig::ampere,
    ),
    modes(
        "shares_fit_until_memory_or_compute_is_given_away",
        shares::over_capacity,
    ),
    modes(
        "a_whole_gpu_waits_for_the_last_share_and_shares_for_it",
        shares::whole_and_shares,
    ),
    modes(
        "a_partition_waits_for_the_last_share_and_shares_for_it",
        shares::partitions_and_shares,
    ),
    modes(
        "sixteen_shares_leave_a_gpu_free_when_the_last_is_gone",
        shares::leaves,
    ),
    shares(
        "several_shares_in_one_pod_are_packed_or_spread",
        shares::several,
    ),
    shares("many_pods_run_on_one_card", shares::deployment),
    shares(
        "many_shares_live_through_kills_of_kubelet_and_plugin",
        shares::killed_kubelet,
    ),
    shares(
        "a_shared_gpu_has_the_time_slice_of_its_policy_and_its_own_again",
        shares::intervals,
    ),
    modes(
        "mps_shares_run_by_a_daemon_that_outlives_its_supervisor",
        shares::mps,
    ),
    modes(
        "mps_shares_have_namespaces_of_any_size_with_r615",
        shares::mps_of_any_size,
    ),
    modes(
        "mps_shares_survive_kills_in_the_middle_of_prepares_and_releases",
        shares::killed_mps,
    ),
    modes(
        "mps_inside_partitions_by_policy_and_for_one_claim",
        shares::mps_in_partitions,
    ),
    modes(
        "mps_servers_that_wedge_are_reported_and_started_anew",
        shares::wedged_mps,
    ),
    modes(
        "mps_shares_of_a_hostile_pod_harm_no_one_else",
        shares::hostile_mps,
    ),
    modes(
        "mps_shares_of_any_size_are_capped_in_their_pods_groups",
        shares::capped_mps,
    ),
    shares("the_memory_of_shares_is_capped_pod_by_pod", shares::caps),
    modes(
        "metrics_show_who_uses_what_and_only_what_is_over_its_grant_is_reported",
        shares::usage,
    ),
    modes(
        "prometheus_answers_every_query_of_rules_dashboards_and_autoscalers",
        shares::prometheus,
    ),
    modes(
        "pods_that_harm_others_or_idle_are_evicted_under_a_policy_and_no_others",
        shares::reclaimed,
    ),
    modes(
        "a_namespace_gets_no_more_gpu_memory_than_its_quota",
        shares::quota,
    ),
    modes("a_monitor_sees_gpus_that_others_hold", shares::admin),
    alone("a_share_can_be_an_extended_resource", shares::extended),
    modes(
        "instances_of_an_admin_are_given_out_and_never_touched",
        shares::static_partitions,
    ),
    alone("gpus_of_one_node_have_different_modes", shares::per_gpu),
    alone("policies_are_for_nodes_by_name_and_label", shares::per_node),
    modes("a_changed_policy_takes_nothing_away", shares::hot),
    modes(
        "a_gpu_is_not_given_out_while_a_slow_write_of_its_old_mode_is_under_way",
        shares::slow_write,
    ),
    modes(
        "no_claim_is_lost_when_policies_change_under_it",
        shares::flips,
    ),
    alone("a_bad_policy_is_refused", shares::bad),
    shares("of_two_policies_priority_and_name_decide", shares::two),
    older("an_older_cluster_gets_one_mode_of_a_gpu", shares::one_mode),
    older(
        "nothing_is_given_out_twice_on_an_older_cluster",
        shares::not_twice,
    ),
    modes("the_commands_of_the_readme_work", examples::readme),
    modes(
        "partitions_made_by_others_are_tainted_and_never_destroyed",
        mig::foreign,
    ),
];

const fn together(name: &'static str, run: fn(&Env) -> Result<()>) -> Case {
    Case {
        name,
        alone: false,
        of_sharing: false,
        clusters: Clusters::All,
        run,
    }
}

/// Makes a case that is run on each release of Kubernetes, too.
const fn of_versions(name: &'static str, run: fn(&Env) -> Result<()>) -> Case {
    Case {
        of_sharing: true,
        ..together(name, run)
    }
}

const fn alone(name: &'static str, run: fn(&Env) -> Result<()>) -> Case {
    Case {
        alone: true,
        ..together(name, run)
    }
}

/// Partitions and several modes of one GPU.
const fn modes(name: &'static str, run: fn(&Env) -> Result<()>) -> Case {
    Case {
        of_sharing: true,
        clusters: Clusters::SeveralModes,
        ..alone(name, run)
    }
}

/// Makes a case as [`modes`] does, beside others: each takes GPUs of its own.
const fn beside(name: &'static str, run: fn(&Env) -> Result<()>) -> Case {
    Case {
        alone: false,
        ..modes(name, run)
    }
}

/// Shares as the only mode of a GPU.
const fn shares(name: &'static str, run: fn(&Env) -> Result<()>) -> Case {
    Case {
        of_sharing: true,
        clusters: Clusters::Shares,
        ..alone(name, run)
    }
}

/// Makes a case of what older clusters get.
const fn older(name: &'static str, run: fn(&Env) -> Result<()>) -> Case {
    Case {
        of_sharing: true,
        clusters: Clusters::OneMode,
        ..alone(name, run)
    }
}

//! Servers: gRPC on the sockets, HTTP on the addresses of the config.

use divvy_telemetry::HttpServer;
use tokio::net::{TcpListener, UnixListener};
use tokio_stream::wrappers::UnixListenerStream;
use tokio_util::sync::CancellationToken;
use tonic::transport::server::Router;

use crate::config::Config;
use crate::debug::Debug;
use crate::error::{RunError, io_error};

/// Serves gRPC on a socket until `stop`.
pub(crate) async fn serve(
    name: &'static str,
    router: Router,
    listener: UnixListener,
    stop: CancellationToken,
) -> Result<(), RunError> {
    let connections = UnixListenerStream::new(listener);
    let served = router.serve_with_incoming_shutdown(connections, stop.cancelled_owned()).await;
    served.map_err(|error| RunError::Server(name, error))
}

/// Everyone may ask for metrics and readiness; what claims there are is told where `config` says, by default to
/// processes of this host or pod only.
pub(crate) async fn http_servers(
    config: &Config,
    server: HttpServer,
    debug: Debug,
) -> Result<Vec<(HttpServer, TcpListener)>, RunError> {
    let telling = server.clone().debug_state(move || debug.state());
    let open = if config.http_tells_state() { telling.clone() } else { server };
    let mut servers = Vec::new();
    for (flag, addresses, server) in
        [("--http", &config.http, open), ("--debug-http", &config.debug_http, telling)]
    {
        let Some(first) = addresses.first() else { continue };
        let bound = TcpListener::bind(&**addresses).await;
        let listener = bound.map_err(io_error(format!("{flag} {first}")))?;
        if let Ok(address) = listener.local_addr() {
            tracing::info!(%address, state = server.tells_state(), "serving /metrics, /healthz and /readyz");
        }
        servers.push((server, listener));
    }
    Ok(servers)
}

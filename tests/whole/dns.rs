//! Names of Services, and of the pods of those without an address, as CoreDNS answers them.

use std::net::Ipv4Addr;

use tokio::net::UdpSocket;

use super::host::DNS;
use super::services::ServiceProxy;

const SUFFIX: &str = ".svc.cluster.local";
/// Type of a question for an IPv4 address.
const A: u16 = 1;
const HEADER: usize = 12;

/// Answers at the cluster's DNS.
pub(crate) async fn start(services: ServiceProxy) {
    let socket = UdpSocket::bind((DNS, 53)).await.unwrap();
    tokio::spawn(async move {
        let mut packet = [0; 512];
        while let Ok((length, from)) = socket.recv_from(&mut packet).await {
            if let Some(answer) = answer(&services, &packet[..length]) {
                // Who does not get it asks again.
                let _ = socket.send_to(&answer, from).await;
            }
        }
    });
}

fn answer(services: &ServiceProxy, query: &[u8]) -> Option<Vec<u8>> {
    let mut labels = Vec::new();
    let mut at = HEADER;
    loop {
        let length = usize::from(*query.get(at)?);
        at += 1;
        if length == 0 {
            break;
        }
        labels.push(String::from_utf8_lossy(query.get(at..at + length)?).to_ascii_lowercase());
        at += length;
    }
    let kind = u16::from_be_bytes(query.get(at..at + 2)?.try_into().unwrap());
    let question = query.get(HEADER..at + 4)?;
    let found = addresses(services, &labels.join("."));
    let (code, addresses) = match found {
        None => (3, Vec::new()),
        Some(addresses) if kind == A => (0, addresses),
        Some(_) => (0, Vec::new()),
    };
    let mut answer = query[..2].to_vec();
    answer.extend([0x84, 0x80 | code, 0, 1]);
    answer.extend(u16::try_from(addresses.len()).unwrap().to_be_bytes());
    answer.extend([0; 4]);
    answer.extend(question);
    for address in addresses {
        // The question's name; type A, class IN, for a second, four bytes.
        answer.extend([0xc0, 0x0c, 0, 1, 0, 1, 0, 0, 0, 1, 0, 4]);
        answer.extend(address.octets());
    }
    Some(answer)
}

/// `None` if there is no such name.
fn addresses(services: &ServiceProxy, name: &str) -> Option<Vec<Ipv4Addr>> {
    let name = name.strip_suffix(SUFFIX)?;
    let parts: Vec<&str> = name.split('.').collect();
    let (host, service, namespace) = match parts[..] {
        [service, namespace] => (None, service, namespace),
        [host, service, namespace] => (Some(host), service, namespace),
        _ => return None,
    };
    let object = services.get(namespace, service)?;
    let own = object.spec.as_ref()?.cluster_ip.as_ref().and_then(|address| address.parse().ok());
    if let (None, Some(own)) = (host, own) {
        return Some(vec![own]);
    }
    let endpoints = services.endpoints(namespace, service, None).into_iter().map(|(endpoint, _)| endpoint);
    let named = endpoints.filter(|endpoint| host.is_none() || endpoint.hostname.as_deref() == host);
    let addresses: Vec<Ipv4Addr> = named.map(|endpoint| endpoint.address).collect();
    (host.is_none() || !addresses.is_empty()).then_some(addresses)
}

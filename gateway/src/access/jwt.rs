//! JSON Web Tokens (RFC 7519) of an identity provider whose public keys (JWKS, RFC 7517) are in a file.

use std::collections::BTreeSet;
use std::path::Path;
use std::sync::Arc;

use jsonwebtoken::errors::ErrorKind;
use jsonwebtoken::jwk::{AlgorithmParameters, EllipticCurve, Jwk, KeyAlgorithm, PublicKeyUse};
use jsonwebtoken::{Algorithm, DecodingKey, Validation, decode, decode_header};
use serde_json::{Map, Value};

use super::caller::{AccessScope, AuthenticatedCaller};
use super::file::MAX_TENANT_LEN;
use super::options::{AccessOptions, JwtRequirements};
use crate::reloadable_file::{BoundedReadError, read_limited};

/// Largest JWKS file in bytes.
const MAX_FILE_BYTES: u64 = 1 << 20;
/// Most keys in a JWKS; providers publish two or three.
const MAX_KEYS: usize = 64;

/// Public keys of the identity provider.
#[derive(Debug)]
pub(super) struct VerificationKeySet(Vec<VerificationKey>);

struct VerificationKey {
    id: Option<String>,
    /// Signature algorithms that the key may verify.
    algorithms: Vec<Algorithm>,
    key: DecodingKey,
}

impl std::fmt::Debug for VerificationKey {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("VerificationKey").field("id", &self.id).finish_non_exhaustive()
    }
}

/// Why a JWKS file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum JwksError {
    #[error(transparent)]
    Read(#[from] BoundedReadError),
    #[error(transparent)]
    Json(#[from] serde_json::Error),
    /// The file is JSON without the list of keys.
    #[error("it has no list `keys`; is it a JWKS?")]
    NoKeyList,
    #[error("it has more than {MAX_KEYS} keys")]
    TooManyKeys,
    /// All keys are of unsupported types, or for other purposes.
    #[error("it has no public key for RS256, PS256, ES256, ES384 or EdDSA signatures")]
    NoUsableKey,
}

/// Why a token is rejected.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum JwtRejection {
    /// Malformed, expired, or not signed by a key of the provider; the text is for the client.
    Invalid(&'static str),
    /// Valid, but without the required scope.
    MissingScope,
}

impl VerificationKeySet {
    pub(super) fn read(path: &Path) -> Result<Self, JwksError> {
        Self::parse(&read_limited(path, MAX_FILE_BYTES)?)
    }

    fn parse(text: &str) -> Result<Self, JwksError> {
        let set: Value = serde_json::from_str(text)?;
        let listed = set.get("keys").and_then(Value::as_array).ok_or(JwksError::NoKeyList)?;
        if listed.len() > MAX_KEYS {
            return Err(JwksError::TooManyKeys);
        }
        // A provider may list keys of unsupported types, or for other purposes.
        let keys: Vec<VerificationKey> = listed.iter().filter_map(parse_key).collect();
        if keys.is_empty() {
            return Err(JwksError::NoUsableKey);
        }
        Ok(Self(keys))
    }

    pub(super) fn len(&self) -> usize {
        self.0.len()
    }

    /// Verifies a token and returns its caller.
    pub(super) fn verify(
        &self,
        token: &[u8],
        rules: &JwtRequirements,
    ) -> Result<AuthenticatedCaller, JwtRejection> {
        let header = decode_header(token).map_err(|_| JwtRejection::Invalid("it is not a signed JWT"))?;
        // A recipient must reject a token with critical parameters that it does not support (RFC 7515, section 4.1.11).
        if header.crit.is_some() {
            return Err(JwtRejection::Invalid(
                "its header has critical parameters (crit), which are not supported",
            ));
        }
        let fits = |key: &&VerificationKey| {
            key.algorithms.contains(&header.alg)
                && header.kid.as_ref().is_none_or(|id| key.id.as_ref() == Some(id))
        };
        let mut reason = JwtRejection::Invalid("none of the provider's keys matches it");
        for key in self.0.iter().filter(fits) {
            match decode::<Map<String, Value>>(token, &key.key, &rules.validation(&key.algorithms)) {
                Ok(token) => return rules.caller(&token.claims),
                Err(error) => reason = JwtRejection::Invalid(describe_error(error.kind())),
            }
        }
        Err(reason)
    }
}

/// Tenant of a token under a JWKS and the rules of `options`, if it is valid: for fuzzing.
#[must_use]
pub fn tenant_of_token(jwks: &str, token: &[u8], options: &AccessOptions) -> Option<Arc<str>> {
    let caller = VerificationKeySet::parse(jwks).ok()?.verify(token, &options.token_rules()?).ok()?;
    Some(caller.tenant)
}

/// A key that can verify signatures, with the algorithms of its type: the `alg` of a token's header alone is never trusted.
fn parse_key(value: &Value) -> Option<VerificationKey> {
    let jwk: Jwk = serde_json::from_value(value.clone()).ok()?;
    if jwk.common.public_key_use.as_ref().is_some_and(|purpose| *purpose != PublicKeyUse::Signature) {
        return None;
    }
    let supported: &[Algorithm] = match &jwk.algorithm {
        AlgorithmParameters::RSA(_) => &[
            Algorithm::RS256,
            Algorithm::RS384,
            Algorithm::RS512,
            Algorithm::PS256,
            Algorithm::PS384,
            Algorithm::PS512,
        ],
        AlgorithmParameters::EllipticCurve(key) => match key.curve {
            EllipticCurve::P256 => &[Algorithm::ES256],
            EllipticCurve::P384 => &[Algorithm::ES384],
            _ => return None,
        },
        AlgorithmParameters::OctetKeyPair(key) if key.curve == EllipticCurve::Ed25519 => &[Algorithm::EdDSA],
        _ => return None,
    };
    let algorithms = match &jwk.common.key_algorithm {
        None => supported.to_vec(),
        Some(only) => vec![*supported.iter().find(|algorithm| is_same_algorithm(**algorithm, only))?],
    };
    Some(VerificationKey { key: DecodingKey::from_jwk(&jwk).ok()?, id: jwk.common.key_id, algorithms })
}

fn is_same_algorithm(algorithm: Algorithm, named: &KeyAlgorithm) -> bool {
    named.to_string().parse() == Ok(algorithm)
}

fn describe_error(kind: &ErrorKind) -> &'static str {
    match kind {
        ErrorKind::ExpiredSignature => "it has expired",
        ErrorKind::ImmatureSignature => "it is not valid yet",
        ErrorKind::InvalidAudience => "it is for another audience",
        ErrorKind::InvalidIssuer => "it is from another issuer",
        ErrorKind::MissingRequiredClaim(_) => "it lacks one of the claims exp, iss and aud",
        ErrorKind::InvalidSignature => "its signature is invalid",
        _ => "it cannot be verified",
    }
}

impl JwtRequirements {
    fn validation(&self, algorithms: &[Algorithm]) -> Validation {
        let leeway = self.leeway.as_secs();
        let mut validation = Validation {
            algorithms: algorithms.to_vec(),
            validate_nbf: true,
            leeway,
            ..Validation::default()
        };
        validation.set_required_spec_claims(&["exp", "iss", "aud"]);
        validation.set_issuer(&[&self.issuer]);
        validation.set_audience(&self.audience);
        validation
    }

    /// Builds the caller from claims whose signature has been verified.
    fn caller(&self, claims: &Map<String, Value>) -> Result<AuthenticatedCaller, JwtRejection> {
        if let Some(scope) = &self.scope {
            // RFC 8693 has a space-separated string; some providers send an array.
            let granted = match claims.get("scope").or_else(|| claims.get("scp")) {
                Some(Value::String(text)) => text.split(' ').any(|granted| granted == scope),
                Some(Value::Array(list)) => list.iter().any(|granted| granted == scope.as_str()),
                _ => false,
            };
            if !granted {
                return Err(JwtRejection::MissingScope);
            }
        }
        let tenant = claims.get(&self.tenant_claim).and_then(Value::as_str);
        let tenant = tenant.filter(|name| !name.is_empty() && name.len() <= MAX_TENANT_LEN);
        let tenant = tenant.ok_or(JwtRejection::Invalid("it lacks the claim that names the tenant"))?;
        Ok(AuthenticatedCaller {
            tenant: Arc::from(tenant),
            scopes: Arc::new(BTreeSet::from([AccessScope::Inference])),
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use jsonwebtoken::{EncodingKey, Header, encode, get_current_timestamp};
    use serde_json::json;

    use super::*;

    /// Private key bytes, used by this test only.
    const SEED: [u8; 32] = [7; 32];

    fn rules() -> JwtRequirements {
        JwtRequirements {
            issuer: "https://id.example".to_owned(),
            audience: vec!["moongate".to_owned()],
            tenant_claim: "org".to_owned(),
            scope: None,
            leeway: Duration::from_secs(60),
        }
    }

    /// The private key as PKCS#8 (RFC 8410), and a set with its public key.
    fn test_keys() -> (EncodingKey, VerificationKeySet) {
        let mut der = vec![0x30, 0x2e, 2, 1, 0, 0x30, 5, 6, 3, 0x2b, 0x65, 0x70, 4, 0x22, 4, 0x20];
        der.extend(SEED);
        let key = EncodingKey::from_ed_der(&der);
        let jwk = Jwk::from_encoding_key(&key, Algorithm::EdDSA).unwrap();
        let set = json!({"keys": [{"kty": "XYZ", "kid": "future"}, jwk]});
        (key, VerificationKeySet::parse(&set.to_string()).unwrap())
    }

    fn claims() -> Value {
        json!({"iss": "https://id.example", "aud": ["moongate", "other"], "org": "team-a", "scope": "openid llm",
               "exp": get_current_timestamp() + 600})
    }

    fn with(change: Value) -> Value {
        let mut claims = claims();
        claims.as_object_mut().unwrap().extend(change.as_object().unwrap().clone());
        claims
    }

    #[test]
    fn a_valid_token_names_the_tenant() {
        let (key, set) = test_keys();
        assert_eq!(set.len(), 1, "the unknown key type is ignored");
        let token = encode(&Header::new(Algorithm::EdDSA), &claims(), &key).unwrap();
        let caller = set.verify(token.as_bytes(), &rules()).unwrap();
        assert_eq!(
            (&*caller.tenant, caller.has_scope(AccessScope::Inference), caller.has_scope(AccessScope::Admin)),
            ("team-a", true, false)
        );
        let with_scope = |scope: &str| JwtRequirements { scope: Some(scope.to_owned()), ..rules() };
        assert!(set.verify(token.as_bytes(), &with_scope("llm")).is_ok());
        assert_eq!(set.verify(token.as_bytes(), &with_scope("ll")), Err(JwtRejection::MissingScope));
    }

    #[test]
    fn invalid_claims_are_rejected_with_a_reason() {
        let (key, set) = test_keys();
        let now = get_current_timestamp();
        for (change, part) in [
            (json!({"exp": now - 61}), "expired"),
            (json!({"exp": null}), "lacks"),
            (json!({"nbf": now + 120}), "not valid yet"),
            (json!({"aud": "other"}), "audience"),
            (json!({"aud": null}), "lacks"),
            (json!({"iss": "https://else.example"}), "issuer"),
            (json!({"org": 7}), "tenant"),
            (json!({"org": ""}), "tenant"),
        ] {
            let token = encode(&Header::new(Algorithm::EdDSA), &with(change.clone()), &key).unwrap();
            match set.verify(token.as_bytes(), &rules()) {
                Err(JwtRejection::Invalid(reason)) => assert!(reason.contains(part), "{change}: {reason}"),
                other => panic!("{change}: {other:?}"),
            }
        }
        let token = encode(&Header::new(Algorithm::EdDSA), &with(json!({"exp": now - 30})), &key).unwrap();
        assert!(set.verify(token.as_bytes(), &rules()).is_ok(), "clocks may differ by the leeway");
    }

    #[test]
    fn alg_none_and_hmac_with_the_public_key_are_rejected() {
        let (key, set) = test_keys();
        let good = encode(&Header::new(Algorithm::EdDSA), &claims(), &key).unwrap();
        let (_, rest) = good.split_once('.').unwrap();
        let (payload, _) = rest.split_once('.').unwrap();
        // {"alg":"none"}
        for token in
            [format!("eyJhbGciOiJub25lIn0.{payload}."), format!("{payload}.{payload}.x"), "a.b".to_owned()]
        {
            assert!(
                matches!(set.verify(token.as_bytes(), &rules()), Err(JwtRejection::Invalid(_))),
                "{token}"
            );
        }
        let public = set.0[0].key.try_get_as_bytes().unwrap();
        let forged =
            encode(&Header::new(Algorithm::HS256), &claims(), &EncodingKey::from_secret(public)).unwrap();
        assert!(matches!(set.verify(forged.as_bytes(), &rules()), Err(JwtRejection::Invalid(_))));
        let mut changed = good.into_bytes();
        let last = changed.len() - 10;
        changed[last] = if changed[last] == b'A' { b'B' } else { b'A' };
        assert_eq!(set.verify(&changed, &rules()), Err(JwtRejection::Invalid("its signature is invalid")));
    }

    #[test]
    fn critical_header_parameters_are_rejected() {
        let (key, set) = test_keys();
        for crit in [vec!["exp".to_owned()], vec!["b64".to_owned()], Vec::new()] {
            let header = Header { crit: Some(crit), ..Header::new(Algorithm::EdDSA) };
            let token = encode(&header, &claims(), &key).unwrap();
            match set.verify(token.as_bytes(), &rules()) {
                Err(JwtRejection::Invalid(reason)) => assert!(reason.contains("crit"), "{reason}"),
                other => panic!("{other:?}"),
            }
        }
    }

    #[test]
    fn symmetric_and_encryption_keys_are_ignored() {
        let oct = json!({"keys": [{"kty": "oct", "k": "c2VjcmV0", "alg": "HS256"}]}).to_string();
        assert!(matches!(VerificationKeySet::parse(&oct), Err(JwksError::NoUsableKey)));
        let (key, _) = test_keys();
        let mut jwk = json!(Jwk::from_encoding_key(&key, Algorithm::EdDSA).unwrap());
        jwk["use"] = json!("enc");
        assert!(VerificationKeySet::parse(&json!({"keys": [jwk]}).to_string()).is_err());
        assert!(matches!(VerificationKeySet::parse("[]"), Err(JwksError::NoKeyList)));
    }
}
